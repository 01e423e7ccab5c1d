"""What a run resumes from: checkpoints and their manifests, the options that may change, and the whole state."""
