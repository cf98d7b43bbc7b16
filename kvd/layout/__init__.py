"""Device layouts: where each element of a tensor lies, and how one layout becomes another (HAWK, section 4).

``descriptor`` has the words, ``notation`` the text, TOML and wire forms, ``named`` the layouts of known devices and
engines, ``codec`` the number formats, ``plan`` the two steps from one layout to another, ``execute`` runs the first.
"""
