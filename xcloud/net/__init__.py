"""Links between ranks: frames, gloo, memory, the emulated line, heartbeats."""
