"""Do graphed runs compute what eager ones do: rules over curves."""
