//! Copies between a caller's memory and a region's data area.
#![allow(unsafe_code, reason = "the data area is reached by raw pointers only, never by reference")]

use std::ptr;

use xxhash_rust::xxh3::Xxh3;

use super::Region;
use crate::error::{Error, Result};

/// Small enough to stay in the nearest cache.
const CHECKSUM_CHUNK: usize = 16 << 10;

/// A run of bytes of the data area: offset from its begin, and length.
pub type Piece = (u64, u64);

impl Region {
    /// Copies `source` into the data area: the first bytes into the first piece until that is full, and so on;
    /// the last piece may stay partly as it was. Nothing is copied if there is an error. From any thread.
    ///
    /// The region's lock is neither needed nor enough: the pieces belong to an entry that the caller is writing,
    /// and whoever writes to what is not his, or reads what is being written, gets mixed bytes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a piece does not lie in the data area or `source` is longer than the
    /// pieces; [`Error::Closed`] after [`Region::close`] or a fork.
    pub fn write_pieces(&self, pieces: &[Piece], source: &[u8]) -> Result<()> {
        // SAFETY: a slice is readable for its length.
        unsafe { self.write_pieces_from(pieces, source.as_ptr(), source.len()) }
    }

    /// [`Region::write_pieces`] from memory that is no Rust slice, such as another program's buffer.
    ///
    /// # Safety
    /// - `source` is readable for `len` bytes until the call returns.
    /// - Nobody in this process writes those bytes meanwhile.
    pub unsafe fn write_pieces_from(&self, pieces: &[Piece], source: *const u8, len: usize) -> Result<()> {
        self.for_each_run(pieces, len, |place, done, run| {
            // SAFETY: `done + run` is at most `len`.
            let from = unsafe { source.add(done) };
            // SAFETY: the caller vouches for the source; the run lies in the data area, which is mapped as
            // long as `self` lives, and is bytes without meaning, reached by raw pointers only. They may
            // overlap (the source may be a view of this very area), so this is a move.
            unsafe { ptr::copy(from, place, run) };
        })
    }

    /// Copies out of the data area, in the order of the pieces, until `destination` is full.
    /// Otherwise as [`Region::write_pieces`].
    ///
    /// # Errors
    /// As [`Region::write_pieces`].
    pub fn read_pieces(&self, pieces: &[Piece], destination: &mut [u8]) -> Result<()> {
        // SAFETY: a mutable slice is writable for its length, and nobody else has it.
        unsafe { self.read_pieces_into(pieces, destination.as_mut_ptr(), destination.len()) }
    }

    /// [`Region::read_pieces`] into memory that is no Rust slice, such as another program's buffer.
    ///
    /// # Safety
    /// - `destination` is writable for `len` bytes until the call returns.
    /// - Nobody in this process reads or writes those bytes meanwhile.
    pub unsafe fn read_pieces_into(&self, pieces: &[Piece], destination: *mut u8, len: usize) -> Result<()> {
        self.for_each_run(pieces, len, |place, done, run| {
            // SAFETY: `done + run` is at most `len`.
            let to = unsafe { destination.add(done) };
            // SAFETY: the caller vouches for the destination; the run lies in the data area, which is mapped as
            // long as `self` lives. They may overlap, so this is a move.
            unsafe { ptr::copy(place, to, run) };
        })
    }

    /// The checksum (XXH3, 64 bits) of `len` bytes of the data area, in the order of the pieces. From any thread.
    ///
    /// # Errors
    /// As [`Region::write_pieces`].
    pub fn checksum(&self, pieces: &[Piece], len: u64) -> Result<u64> {
        let len = usize::try_from(len).map_err(|_| Error::invalid("length", len, "one that fits into memory"))?;
        let mut hasher = Xxh3::new();
        let mut chunk = [0u8; CHECKSUM_CHUNK];
        self.for_each_run(pieces, len, |place, _, run| {
            for begin in (0..run).step_by(CHECKSUM_CHUNK) {
                let part = &mut chunk[..CHECKSUM_CHUNK.min(run - begin)];
                let from = place.wrapping_add(begin);
                // SAFETY: the run lies in the data area, which is mapped as long as `self` lives, and `begin + part.len()`
                // is at most `run`; `part` is this frame's own. Other processes may write there, so the bytes are
                // moved out before Rust looks at them.
                unsafe { ptr::copy_nonoverlapping(from, part.as_mut_ptr(), part.len()) };
                hasher.update(part);
            }
        })?;
        Ok(hasher.digest())
    }

    /// Calls `copy(place in the data area, bytes done so far, bytes of this run)` for each run of `len` bytes
    /// in all, after having checked everything.
    fn for_each_run(&self, pieces: &[Piece], len: usize, mut copy: impl FnMut(*mut u8, usize, usize)) -> Result<()> {
        self.check_usable()?;
        check_pieces(pieces, len as u64, self.data.len())?;
        let mut done = 0;
        for &(offset, room) in pieces {
            // The piece lies in the data area, so both fit in an address.
            let run = (room as usize).min(len - done);
            copy(self.data.begin().wrapping_add(offset as usize), done, run);
            done += run;
        }
        Ok(())
    }
}

fn check_pieces(pieces: &[Piece], wanted: u64, data_len: u64) -> Result<()> {
    let mut room = 0u64;
    for &(offset, len) in pieces {
        if offset.checked_add(len).is_none_or(|end| end > data_len) {
            return Err(Error::InvalidArgument(format!(
                "a piece of {len} bytes at {offset} does not lie in a data area of {data_len} bytes"
            )));
        }
        room = room.saturating_add(len);
    }
    if wanted > room {
        return Err(Error::InvalidArgument(format!(
            "{wanted} bytes are to be copied, but the pieces have only {room}"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_must_lie_in_the_data_and_be_long_enough() {
        assert!(check_pieces(&[], 0, 0).is_ok());
        assert!(check_pieces(&[(0, 5), (5, 5)], 10, 10).is_ok());
        assert!(check_pieces(&[(10, 0)], 0, 10).is_ok());
        assert!(check_pieces(&[(0, 5), (5, 5)], 11, 10).is_err());
        assert!(check_pieces(&[(6, 5)], 1, 10).is_err());
        assert!(check_pieces(&[(u64::MAX, 2)], 1, 10).is_err());
        assert!(check_pieces(&[(0, u64::MAX)], 1, 10).is_err());
    }
}
