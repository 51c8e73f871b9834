"""What a mind does with events: attention, memory, and the limits of both.

Everything here stands on the public calls of a bus. The core does not know these modules.
"""
