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

use crate::index::records::{Links, Slot};
use crate::index::{Checked, Damaged};

/// The ends of the queue, as references (number plus one; 0 is none).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Queue {
    pub(crate) head: u32,
    pub(crate) tail: u32,
}

impl Queue {
    /// Puts the entry at the end.
    pub(crate) fn push(&mut self, slots: &mut [Slot], entry: u32) -> Checked<()> {
        let tail = self.tail;
        let link = at(slots, entry)?;
        if link.queued != 0 {
            return Err(Damaged(&"an entry joins the queue twice"));
        }
        (link.queue_prev, link.queue_next, link.queued) = (tail, 0, 1);
        match tail.checked_sub(1) {
            Some(last) => at(slots, last)?.queue_next = entry + 1,
            None => self.head = entry + 1,
        }
        self.tail = entry + 1;
        Ok(())
    }

    /// Takes the entry out.
    pub(crate) fn remove(&mut self, slots: &mut [Slot], entry: u32) -> Checked<()> {
        let link = at(slots, entry)?;
        if link.queued == 0 {
            return Err(Damaged(&"an entry leaves the queue that it is not in"));
        }
        let (prev, next) = (link.queue_prev, link.queue_next);
        (link.queue_prev, link.queue_next, link.queued) = (0, 0, 0);
        match prev.checked_sub(1) {
            Some(before) => at(slots, before)?.queue_next = next,
            None => self.head = next,
        }
        match next.checked_sub(1) {
            Some(after) => at(slots, after)?.queue_prev = prev,
            None => self.tail = prev,
        }
        Ok(())
    }

    /// The entry that joined longest ago among those without a lease.
    pub(crate) fn oldest(&self, slots: &[Slot]) -> Checked<Option<u32>> {
        let mut next = self.head;
        for _ in 0..=slots.len() {
            let Some(entry) = next.checked_sub(1) else { return Ok(None) };
            let link = &slots.get(entry as usize).ok_or(Damaged(&"the queue leaves the table"))?.links;
            if link.leases == 0 {
                return Ok(Some(entry));
            }
            next = link.queue_next;
        }
        Err(Damaged(&"the queue is a ring"))
    }
}

fn at(slots: &mut [Slot], entry: u32) -> Checked<&mut Links> {
    slots.get_mut(entry as usize).map(|slot| &mut slot.links).ok_or(Damaged(&"the queue leaves the table"))
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;

    fn table(len: usize) -> Vec<Slot> {
        Slot::new_vec_zeroed(len).unwrap()
    }

    fn order(queue: Queue, slots: &[Slot]) -> Vec<u32> {
        let mut found = Vec::new();
        let mut next = queue.head;
        while let Some(entry) = next.checked_sub(1) {
            found.push(entry);
            next = slots[entry as usize].links.queue_next;
        }
        found
    }

    #[test]
    fn entries_leave_in_the_order_in_which_they_came() {
        let (mut queue, mut slots) = (Queue::default(), table(5));
        for entry in [3, 0, 4] {
            queue.push(&mut slots, entry).unwrap();
        }
        assert_eq!(order(queue, &slots), [3, 0, 4]);
        queue.remove(&mut slots, 0).unwrap();
        queue.push(&mut slots, 0).unwrap();
        assert_eq!(order(queue, &slots), [3, 4, 0]);
        assert_eq!(queue.oldest(&slots).unwrap(), Some(3));
    }

    #[test]
    fn a_leased_entry_is_passed_over_and_keeps_its_place() {
        let (mut queue, mut slots) = (Queue::default(), table(3));
        for entry in [0, 1, 2] {
            queue.push(&mut slots, entry).unwrap();
        }
        slots[0].links.leases = 1;
        assert_eq!(queue.oldest(&slots).unwrap(), Some(1));
        slots[0].links.leases = 0;
        assert_eq!(queue.oldest(&slots).unwrap(), Some(0));
    }

    #[test]
    fn contradictions_are_damage_and_never_a_hang() {
        let (mut queue, mut slots) = (Queue::default(), table(2));
        queue.push(&mut slots, 0).unwrap();
        assert!(queue.push(&mut slots, 0).is_err());
        assert!(queue.remove(&mut slots, 1).is_err());
        (slots[0].links.leases, slots[0].links.queue_next) = (1, 1);
        assert!(queue.oldest(&slots).is_err(), "a ring");
        slots[0].links.queue_next = 77;
        assert!(queue.oldest(&slots).is_err(), "out of the table");
    }
}
