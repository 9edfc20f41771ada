"""Every option is defined once; all settings are derived from the user's options."""
