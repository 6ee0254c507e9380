//! Free runs of blocks in size classes.
//!
//! A class holds runs of `2^k + j * 2^(k-3)` blocks and more, up to the next class (eight classes per power of two),
//! as a chain through the runs' first blocks; a bitmap says which classes are not empty. Taking and releasing a run are
//! O(1): a released run finds its free neighbours through the descriptions at their last and first blocks.

use super::records::{FreeRun, NUM_BINS};
use super::{Checked, Damaged, Index, deref, reference};

/// How many runs of the one class that may hold runs too short are looked at.
const LOOK_INTO_CLASS: usize = 8;

/// The class that a run of `len` blocks is kept in.
fn class_of(len: u32) -> usize {
    if len < 8 {
        return len as usize;
    }
    let power = 31 - len.leading_zeros();
    let step = (len >> (power - 3)) & 7;
    (power as usize - 2) * 8 + step as usize
}

/// The least class all of whose runs have at least `len` blocks.
fn class_for(len: u32) -> usize {
    let class = class_of(len);
    if len < 8 {
        return class;
    }
    let power = 31 - len.leading_zeros();
    let rounded_down = (len >> (power - 3)) << (power - 3);
    if rounded_down == len { class } else { class + 1 }
}

impl Index<'_> {
    /// Takes `len` blocks in one run, if there is one.
    pub(super) fn take_run(&mut self, len: u32) -> Checked<Option<u32>> {
        let found = match self.first_used_class(class_for(len)) {
            Some(class) => deref(self.bins.heads[class], self.blocks.len())?,
            None => self.look_into_class(class_of(len), len)?,
        };
        match found {
            Some(first) => self.split_run(first, len).map(Some),
            None => Ok(None),
        }
    }

    /// Takes one of the longest runs, or the first `at_most` blocks of it.
    pub(super) fn take_longest_run(&mut self, at_most: u32) -> Checked<Option<(u32, u32)>> {
        let Some(class) = self.last_used_class() else { return Ok(None) };
        let Some(first) = deref(self.bins.heads[class], self.blocks.len())? else {
            return Err(Damaged(&"an empty class is marked as used"));
        };
        let len = self.run(first)?.len.min(at_most);
        Ok(Some((self.split_run(first, len)?, len)))
    }

    /// Gives blocks back, joining them with their free neighbours in the same segment.
    pub(super) fn release_run(&mut self, first: u32, len: u32) -> Checked<()> {
        let (mut start, mut end) = (first, first.checked_add(len).ok_or(Damaged(&"a run is out of range"))?);
        if end as usize > self.blocks.len() || len == 0 {
            return Err(Damaged(&"a released run is out of range"));
        }
        let per_segment = self.layout.blocks_per_segment;
        if !start.is_multiple_of(per_segment)
            && let Some(head) = deref(self.run(start - 1)?.head, self.blocks.len())?
        {
            self.unlink_run(head)?;
            start = head;
        }
        if !end.is_multiple_of(per_segment) && (end as usize) < self.blocks.len() {
            let right = self.run(end)?.len;
            if right > 0 {
                self.unlink_run(end)?;
                end = end.checked_add(right).ok_or(Damaged(&"a run is out of range"))?;
            }
        }
        if start >= first + len || end <= first {
            return Err(Damaged(&"free runs overlap"));
        }
        self.link_run(start, end - start)
    }

    /// Makes the free run `first..first + len`.
    pub(super) fn link_run(&mut self, first: u32, len: u32) -> Checked<()> {
        let last =
            first.checked_add(len).and_then(|end| end.checked_sub(1)).ok_or(Damaged(&"a run is out of range"))?;
        let class = class_of(len);
        let next = self.bins.heads[class];
        if let Some(next) = deref(next, self.blocks.len())? {
            self.run_mut(next)?.prev = first + 1;
        }
        self.run_mut(last)?.head = first + 1;
        let run = self.run_mut(first)?;
        (run.len, run.prev, run.next) = (len, 0, next);
        self.bins.heads[class] = first + 1;
        self.bins.used[class / 64] |= 1 << (class % 64);
        self.root.free_blocks = self.root.free_blocks.checked_add(len).ok_or(Damaged(&"free blocks overflow"))?;
        Ok(())
    }

    fn unlink_run(&mut self, first: u32) -> Checked<()> {
        let FreeRun { len, prev, next, .. } = *self.run(first)?;
        let last = first.checked_add(len).and_then(|end| end.checked_sub(1)).ok_or(Damaged(&"an empty run"))?;
        if self.run(last)?.head != first + 1 {
            return Err(Damaged(&"the ends of a free run disagree"));
        }
        let (prev, next) = (deref(prev, self.blocks.len())?, deref(next, self.blocks.len())?);
        if let Some(next) = next {
            self.run_mut(next)?.prev = reference(prev);
        }
        let class = class_of(len);
        match prev {
            Some(prev) => self.run_mut(prev)?.next = reference(next),
            None => self.bins.heads[class] = reference(next),
        }
        if self.bins.heads[class] == 0 {
            self.bins.used[class / 64] &= !(1 << (class % 64));
        }
        self.run_mut(last)?.head = 0;
        let run = self.run_mut(first)?;
        (run.len, run.prev, run.next) = (0, 0, 0);
        self.root.free_blocks = self.root.free_blocks.checked_sub(len).ok_or(Damaged(&"too few free blocks"))?;
        Ok(())
    }

    fn split_run(&mut self, first: u32, len: u32) -> Checked<u32> {
        let whole = self.run(first)?.len;
        let rest = whole.checked_sub(len).ok_or(Damaged(&"a run is shorter than its class"))?;
        self.unlink_run(first)?;
        if rest > 0 {
            self.link_run(first + len, rest)?;
        }
        Ok(first)
    }

    fn first_used_class(&self, from: usize) -> Option<usize> {
        let mut word = from / 64;
        let mut bits = *self.bins.used.get(word)? & (u64::MAX << (from % 64));
        while bits == 0 {
            word += 1;
            bits = *self.bins.used.get(word)?;
        }
        Some(word * 64 + bits.trailing_zeros() as usize)
    }

    fn last_used_class(&self) -> Option<usize> {
        let (word, bits) = self.bins.used.iter().enumerate().rev().find(|(_, bits)| **bits != 0)?;
        Some(word * 64 + 63 - bits.leading_zeros() as usize)
    }

    fn look_into_class(&self, class: usize, len: u32) -> Checked<Option<u32>> {
        let mut next = self.bins.heads[class];
        for _ in 0..LOOK_INTO_CLASS {
            let Some(first) = deref(next, self.blocks.len())? else { return Ok(None) };
            let run = self.run(first)?;
            if run.len >= len {
                return Ok(Some(first));
            }
            next = run.next;
        }
        Ok(None)
    }

    fn run(&self, block: u32) -> Checked<&FreeRun> {
        self.blocks.get(block as usize).map(|block| &block.run).ok_or(Damaged(&"a free run is out of range"))
    }

    fn run_mut(&mut self, block: u32) -> Checked<&mut FreeRun> {
        self.blocks.get_mut(block as usize).map(|block| &mut block.run).ok_or(Damaged(&"a free run is out of range"))
    }
}

const _: () = assert!(NUM_BINS > (31 - 2) * 8 + 7);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_run_of_the_class_for_a_length_is_long_enough() {
        for len in (1..5000).chain([u32::MAX / 2, 1 << 20, (1 << 20) + 1]) {
            assert!(class_of(len) <= class_for(len));
            assert!(class_for(len) < NUM_BINS);
            if class_for(len) == class_of(len) && len > 1 {
                assert!(class_of(len - 1) < class_of(len), "{len} is the least of its class");
            }
        }
    }

    #[test]
    fn classes_grow_with_the_length() {
        for len in 1..100_000u32 {
            assert!(class_of(len) <= class_of(len + 1));
        }
    }
}
