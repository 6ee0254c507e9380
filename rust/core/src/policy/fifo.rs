//! First in, first out, as vLLM has it: an entry joins the queue's end each time it becomes evictable.
//!
//! A hit takes an entry out (its load or pin) and puts it back at the end, so the order lies between textbook FIFO
//! and LRU.
//!
//! # Contract
//!
//! The caller guarantees that
//! - `push` is called when an entry becomes READY without pin, load or save, and when the last of these ends, and never
//!   for an entry that is in the queue;
//! - `remove` is called when such a hold begins and when an entry that is in the queue leaves the cache;
//! - a lease does neither: an entry that was only promised keeps its place, and `oldest` passes it over.
//!
//! The queue guarantees that
//! - `oldest` returns the entry that joined longest ago among those without a lease;
//! - each operation but `oldest` is O(1); `oldest` is O(1) plus the leased entries it passes;
//! - it touches only the links of the entry and of its neighbours, bounds every walk, and reports links that contradict
//!   each other as damage.

use crate::index::records::Links;
use crate::index::{Checked, Damaged};

/// The ends of the queue, as references (number plus one; 0 is none).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Queue {
    pub(crate) head: u32,
    pub(crate) tail: u32,
}

impl Queue {
    /// Puts the entry at the end.
    pub(crate) fn push(&mut self, links: &mut [Links], entry: u32) -> Checked<()> {
        let tail = self.tail;
        let link = at(links, entry)?;
        if link.queued != 0 {
            return Err(Damaged("an entry joins the queue twice"));
        }
        (link.queue_prev, link.queue_next, link.queued) = (tail, 0, 1);
        match tail.checked_sub(1) {
            Some(last) => at(links, last)?.queue_next = entry + 1,
            None => self.head = entry + 1,
        }
        self.tail = entry + 1;
        Ok(())
    }

    /// Takes the entry out.
    pub(crate) fn remove(&mut self, links: &mut [Links], entry: u32) -> Checked<()> {
        let link = at(links, entry)?;
        if link.queued == 0 {
            return Err(Damaged("an entry leaves the queue that it is not in"));
        }
        let (prev, next) = (link.queue_prev, link.queue_next);
        (link.queue_prev, link.queue_next, link.queued) = (0, 0, 0);
        match prev.checked_sub(1) {
            Some(before) => at(links, before)?.queue_next = next,
            None => self.head = next,
        }
        match next.checked_sub(1) {
            Some(after) => at(links, after)?.queue_prev = prev,
            None => self.tail = prev,
        }
        Ok(())
    }

    /// The entry that joined longest ago among those without a lease.
    pub(crate) fn oldest(&self, links: &[Links]) -> Checked<Option<u32>> {
        let mut next = self.head;
        for _ in 0..=links.len() {
            let Some(entry) = next.checked_sub(1) else { return Ok(None) };
            let link = links.get(entry as usize).ok_or(Damaged("the queue leaves the table"))?;
            if link.leases == 0 {
                return Ok(Some(entry));
            }
            next = link.queue_next;
        }
        Err(Damaged("the queue is a ring"))
    }
}

fn at(links: &mut [Links], entry: u32) -> Checked<&mut Links> {
    links.get_mut(entry as usize).ok_or(Damaged("the queue leaves the table"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(queue: Queue, links: &[Links]) -> Vec<u32> {
        let mut found = Vec::new();
        let mut next = queue.head;
        while let Some(entry) = next.checked_sub(1) {
            found.push(entry);
            next = links[entry as usize].queue_next;
        }
        found
    }

    #[test]
    fn entries_leave_in_the_order_in_which_they_came() {
        let (mut queue, mut links) = (Queue::default(), vec![Links::default(); 5]);
        for entry in [3, 0, 4] {
            queue.push(&mut links, entry).unwrap();
        }
        assert_eq!(order(queue, &links), [3, 0, 4]);
        queue.remove(&mut links, 0).unwrap();
        queue.push(&mut links, 0).unwrap();
        assert_eq!(order(queue, &links), [3, 4, 0]);
        assert_eq!(queue.oldest(&links).unwrap(), Some(3));
    }

    #[test]
    fn a_leased_entry_is_passed_over_and_keeps_its_place() {
        let (mut queue, mut links) = (Queue::default(), vec![Links::default(); 3]);
        for entry in [0, 1, 2] {
            queue.push(&mut links, entry).unwrap();
        }
        links[0].leases = 1;
        assert_eq!(queue.oldest(&links).unwrap(), Some(1));
        links[0].leases = 0;
        assert_eq!(queue.oldest(&links).unwrap(), Some(0));
    }

    #[test]
    fn contradictions_are_damage_and_never_a_hang() {
        let (mut queue, mut links) = (Queue::default(), vec![Links::default(); 2]);
        queue.push(&mut links, 0).unwrap();
        assert!(queue.push(&mut links, 0).is_err());
        assert!(queue.remove(&mut links, 1).is_err());
        (links[0].leases, links[0].queue_next) = (1, 1);
        assert!(queue.oldest(&links).is_err(), "a ring");
        links[0].queue_next = 77;
        assert!(queue.oldest(&links).is_err(), "out of the table");
    }
}
