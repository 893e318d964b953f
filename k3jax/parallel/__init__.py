"""The mesh, the sharding of every array, and every collective of the project."""
