"""Starting Spark: which Java, which settings, which cluster, and what its errors mean."""
