"""What a run reports while it trains: metrics and their trackers, times, progress, samples, margins and updates."""
