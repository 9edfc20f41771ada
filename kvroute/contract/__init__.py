"""What routers and replicas share: values, fingerprints, keys in Redis."""
