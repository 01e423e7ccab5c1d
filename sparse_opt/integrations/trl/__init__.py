"""TRL's SFT, DPO and GRPO trainers under a mask: their data, and the command line."""
