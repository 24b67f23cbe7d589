"""Judge by rules over curves whether graphed runs compute what eager runs compute."""
