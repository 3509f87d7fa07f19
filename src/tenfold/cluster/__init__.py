"""The same worker behind a cluster runtime: NVIDIA Dynamo."""
