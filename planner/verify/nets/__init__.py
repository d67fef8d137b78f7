"""The networks of the built-in family: a Llama-shaped transformer, a head on hidden states (EAGLE-3, MTP) and a block drafter (DFlash, DSpark)."""
