"""What an attached server has cached: its events, and the tables of blocks made of them."""
