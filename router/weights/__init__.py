"""Updates of a model's weights while the cluster runs, as operators ask for them."""
