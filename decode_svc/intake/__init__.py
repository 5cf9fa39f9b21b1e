"""Getting a prompt computed elsewhere into reserved memory: candidates, destinations, quarantine."""
