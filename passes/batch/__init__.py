"""Where the batch's rows are in a graph, and the graph cut where they are summed."""
