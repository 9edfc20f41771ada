"""The router's queue: requests wait here while every replica is busy, or for a seat.

`Holding.turn` is the entry. It returns when a request may go to a replica, and raises ApiError when
it waits too long. `queue.py` has the order, `shares.py` the tenants' shares and `forecast.py` the
expected waits. `Seating.seat` is the wait for a session's seat, which comes before.
"""
