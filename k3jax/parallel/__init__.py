"""The mesh, the sharding of every array, and the model's collectives."""
