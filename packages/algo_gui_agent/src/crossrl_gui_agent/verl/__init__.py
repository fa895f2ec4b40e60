"""The only place of this package that imports verl: rollout, agent loop, data, engines and trainer as its plug-ins."""
