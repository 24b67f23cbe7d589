"""Evidence about the graphs themselves: replays, capture cost, the first layer that differs."""
