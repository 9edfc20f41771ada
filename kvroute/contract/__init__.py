"""Types that cross process boundaries: requests, records and messages."""
