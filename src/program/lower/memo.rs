//! Answers that were found before.

use std::cell::RefCell;

/// The answers to questions that layers ask alike: finding one takes longer than all else in lowering.
pub(super) struct Memo<Q, A>(RefCell<Vec<(Q, A)>>);

impl<Q, A> Default for Memo<Q, A> {
    fn default() -> Self {
        Self(RefCell::default())
    }
}

impl<Q: PartialEq, A: Clone> Memo<Q, A> {
    /// The answer to a question, found by `find` the first time.
    pub(super) fn get(&self, question: Q, find: impl FnOnce() -> A) -> A {
        if let Some(answer) = self.known(&question) {
            return answer;
        }
        let answer = find();
        self.keep(question, answer.clone());
        answer
    }

    /// The answer, if it was found before.
    pub(super) fn known(&self, question: &Q) -> Option<A> {
        let known = self.0.borrow();
        let found = known.iter().find(|(asked, _)| asked == question);
        found.map(|(_, answer)| answer.clone())
    }

    pub(super) fn keep(&self, question: Q, answer: A) {
        self.0.borrow_mut().push((question, answer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_question_is_answered_once() {
        let memo = Memo::default();
        let found = RefCell::new(Vec::new());
        let square = |n: u32| {
            memo.get(n, || {
                found.borrow_mut().push(n);
                n * n
            })
        };
        assert_eq!([3, 4, 3, 4].map(square), [9, 16, 9, 16]);
        assert_eq!(*found.borrow(), [3, 4]);
    }
}
