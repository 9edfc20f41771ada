"""LoRA adapters that are added while the cluster runs: their records and their files."""
