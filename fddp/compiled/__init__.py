"""What a compiled program says: its schedule (`hlo`), what travels in it (`flights`) and what is computed (`effort`),
and how long a machine that is not here (`targets`, made of `chips`) would take for it (`estimate`)."""
