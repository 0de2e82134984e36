"""The parameter server: slots of rows and dense parameters, kept, updated, replicated and given out."""
