"""What keeps a step from being faster: the device, a slow rank, lowered clocks."""
