"""The megatron engine: Megatron-Core's model, schedules and optimizer."""
