"""The interface of engines, and parts that all engines use."""
