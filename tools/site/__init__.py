"""Documentation site: staged from the repository's pages, built by Zensical."""
