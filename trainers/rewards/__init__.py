"""Rewards: functions of completions, a classifier's score, and a student's log-probabilities."""
