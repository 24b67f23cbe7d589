"""The megatron engine: Megatron-Core's model, schedules and optimizer. Files without torch serve `export` too."""
