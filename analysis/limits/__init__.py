"""What limits a step: the device, a slow rank, lowered clocks."""
