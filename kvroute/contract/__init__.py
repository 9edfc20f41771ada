"""The values that routers and replicas exchange: requests, records, messages."""
