"""The options of users, and the settings of processes that are derived from them."""
