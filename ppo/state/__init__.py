"""What a run goes on from: its state, its checkpoints, the way back."""
