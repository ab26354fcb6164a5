"""The GPU worker: owns every tensor; runs the plans that the scheduler service sends."""
