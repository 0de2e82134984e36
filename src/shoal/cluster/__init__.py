"""The processes of a job: who starts them, who watches them, how they agree."""
