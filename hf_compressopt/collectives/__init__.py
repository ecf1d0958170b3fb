"""The only room from which bytes leave a rank."""
