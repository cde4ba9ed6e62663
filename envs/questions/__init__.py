"""Questions with answers and images: where they come from, and how a response to one is graded."""

from envs.questions.reading import ParquetRows, Question, QuestionSettings, read_question

__all__ = ["ParquetRows", "Question", "QuestionSettings", "read_question"]
