"""The LoRA adapters that operators add while the cluster runs: adding, finding, removing."""
