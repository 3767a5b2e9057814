"""From a run's config to the manifests and commands that start it on Google Cloud."""
