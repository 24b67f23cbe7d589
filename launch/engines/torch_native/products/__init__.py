"""Matrix products of linear layers and experts, in the precision of their operands or in 8 bits."""
