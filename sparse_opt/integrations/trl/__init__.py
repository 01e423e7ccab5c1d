"""TRL's SFT, DPO and GRPO trainers under a mask: their data, the command line, and callbacks for any Trainer."""
