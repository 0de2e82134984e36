"""What a run shows of itself: its directory read back, the dashboard, the drawing of its model."""
