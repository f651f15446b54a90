"""The rollout batch: samples as they are made, which rank has which, how they become passes."""
