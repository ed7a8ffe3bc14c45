"""How the demo model is made: its FAQ, its training and its measure."""
