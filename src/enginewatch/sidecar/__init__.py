"""The sidecar: the I/O shell around the judgement for one engine. It decides nothing."""
