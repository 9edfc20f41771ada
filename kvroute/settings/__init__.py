"""The options that users set, and the settings that kvroute's processes derive from them."""
