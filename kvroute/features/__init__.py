"""What all features of kvroute use."""
