//! A region in memory: two mappings of its file, and typed access to the words that clients share.
//!
//! The control part (header, lock, index, counters) may lie anywhere and is left to `memmap2`. The data
//! part must begin at a 2 MiB boundary of the address space, so that it can be made of huge pages;
//! `memmap2` cannot place a mapping, so that one is placed here, inside an address range reserved beforehand.
#![allow(unsafe_code, reason = "memory that other processes write to has no safe representation")]

use std::fs::File;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64};

use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::mm::{self, MapFlags, ProtFlags};

use super::header::{DIRTY, GENERATIONS, LOCK_COUNTS, LOCK_WORD};
use crate::geometry::{COUNTERS_PER_CLIENT, Geometry, MAX_CLIENTS};

/// Where the data part begins in memory and in the file, and the size of a huge page.
pub(super) const HUGE_PAGE: u64 = 2 << 20;
/// Each client's counters have a page of their own.
const COUNTER_ROW: u64 = 4096;

const _: () = assert!(COUNTERS_PER_CLIENT as u64 * 8 <= COUNTER_ROW);

fn too_large() -> io::Error {
    io::Error::new(io::ErrorKind::OutOfMemory, "it is larger than this machine's address space")
}

/// The pages before the data.
#[derive(Debug)]
pub(super) struct Control {
    map: MmapRaw,
    geometry: Geometry,
}

impl Control {
    /// Maps them. The file must be at least as long as `geometry` says.
    pub(super) fn map(file: &File, geometry: &Geometry) -> io::Result<Self> {
        let len = usize::try_from(geometry.data_offset).map_err(|_| too_large())?;
        let map = MmapOptions::new().len(len).map_raw(file)?;
        // Without it core dumps are the size of the pool. Older kernels may not know it; dumps are larger then.
        let _ = map.advise(Advice::DontDump);
        Ok(Self { map, geometry: *geometry })
    }

    pub(super) fn base(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    pub(super) fn len(&self) -> u64 {
        self.geometry.data_offset
    }

    /// The word at `offset`, which is outside of the index.
    fn word32(&self, offset: usize) -> &AtomicU32 {
        debug_assert!(offset.is_multiple_of(4) && offset < self.geometry.index_offset as usize);
        // SAFETY: the mapping is longer than any offset used here (they lie before the index), so the result
        // points into it.
        let place = unsafe { self.base().add(offset) }.cast::<u32>();
        // SAFETY: aligned, since pages are and the offset is; mapped as long as `self` lives; and only ever
        // reached as an atomic, in every process.
        unsafe { AtomicU32::from_ptr(place) }
    }

    /// The 8-byte word at `offset`, which is outside of the index and of the data.
    fn word64(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && offset + 8 <= self.geometry.data_offset as usize);
        // SAFETY: the mapping is `data_offset` bytes long, and the callers' offsets lie before that.
        let place = unsafe { self.base().add(offset) }.cast::<u64>();
        // SAFETY: aligned, since pages are and the offset is; mapped as long as `self` lives; and only ever
        // reached as an atomic, in every process.
        unsafe { AtomicU64::from_ptr(place) }
    }

    #[inline]
    pub(super) fn lock_word(&self) -> &AtomicU32 {
        self.word32(LOCK_WORD)
    }

    pub(super) fn dirty(&self) -> &AtomicU32 {
        self.word32(DIRTY)
    }

    /// A word of page 0.
    pub(super) fn header_word(&self, offset: usize) -> &AtomicU32 {
        self.word32(offset)
    }

    /// One of the lock's four counts.
    pub(super) fn lock_count(&self, which: usize) -> &AtomicU64 {
        assert!(which < 4);
        self.word64(LOCK_COUNTS + 8 * which)
    }

    /// The generation of a client's place. `None` for an index that no client can have.
    pub(super) fn generation(&self, index: u16) -> Option<&AtomicU32> {
        (index < MAX_CLIENTS).then(|| self.word32(GENERATIONS + 4 * usize::from(index)))
    }

    /// A counter of a client, or of the totals, which are row `MAX_CLIENTS`.
    pub(super) fn counter(&self, row: u16, which: usize) -> &AtomicU64 {
        assert!(row <= MAX_CLIENTS, "client {row} of {MAX_CLIENTS}");
        assert!(which < COUNTERS_PER_CLIENT, "counter {which} of {COUNTERS_PER_CLIENT}");
        debug_assert_eq!(self.geometry.counters_len, COUNTER_ROW * (u64::from(MAX_CLIENTS) + 1));
        let offset = self.geometry.counters_offset + COUNTER_ROW * u64::from(row) + 8 * which as u64;
        self.word64(offset as usize)
    }

    /// The index area. It may be read and written only under the region's lock.
    pub(super) fn index(&self) -> NonNull<[u8]> {
        let len = self.geometry.index_len as usize;
        // SAFETY: the index area lies within the mapping, by the geometry's construction.
        let begin = unsafe { self.base().add(self.geometry.index_offset as usize) };
        // SAFETY: a pointer into a mapping is never null.
        let begin = unsafe { NonNull::new_unchecked(begin) };
        NonNull::slice_from_raw_parts(begin, len)
    }
}

/// The data area, at an address that is a multiple of 2 MiB.
#[derive(Debug)]
pub(super) struct Data {
    /// The whole address range, of which the data area is a part.
    reserved: NonNull<u8>,
    reserved_len: usize,
    begin: NonNull<u8>,
    len: usize,
}

// SAFETY: an owned address range, belonging to no thread; `Data` itself gives out only the pointer and
// touches no byte of it.
unsafe impl Send for Data {}
// SAFETY: as above; `&Data` has nothing to write to.
unsafe impl Sync for Data {}

impl Data {
    /// Maps the data area of a file that is as long as `geometry` says.
    pub(super) fn map(file: &File, geometry: &Geometry) -> io::Result<Self> {
        let len = usize::try_from(geometry.data_len).map_err(|_| too_large())?;
        let huge = HUGE_PAGE as usize;
        let reserved_len = len.checked_add(huge).ok_or_else(too_large)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: no address is asked for, so nothing that is mapped can be replaced.
        let reserved = unsafe { mm::mmap_anonymous(ptr::null_mut(), reserved_len, ProtFlags::empty(), flags) }?;
        let reserved = NonNull::new(reserved.cast::<u8>()).ok_or_else(too_large)?;
        let ahead = reserved.as_ptr().align_offset(huge);
        // SAFETY: `ahead` is less than 2 MiB, and the reservation is 2 MiB longer than the data.
        let begin = unsafe { reserved.add(ahead) };
        let this = Self { reserved, reserved_len, begin, len };
        this.place(file, geometry.data_offset)?;
        Ok(this)
    }

    fn place(&self, file: &File, offset: u64) -> io::Result<()> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the range from `begin` for `len` bytes lies within the reservation, which is ours and
        // unused, so nothing else is replaced.
        unsafe { mm::mmap(self.begin.as_ptr().cast(), self.len, prot, flags, file, offset) }?;
        // SAFETY: the range is mapped and ours; the advice changes no content.
        let advised = unsafe { mm::madvise(self.begin.as_ptr().cast(), self.len, mm::Advice::LinuxDontDump) };
        // As above: without it dumps are larger, nothing else.
        let _ = advised;
        Ok(())
    }

    #[inline]
    pub(super) fn begin(&self) -> *mut u8 {
        self.begin.as_ptr()
    }

    pub(super) fn len(&self) -> u64 {
        self.len as u64
    }
}

impl Drop for Data {
    fn drop(&mut self) {
        // SAFETY: the reservation is ours, and whoever has the data pointer was told that it ends with `self`.
        let unmapped = unsafe { mm::munmap(self.reserved.as_ptr().cast(), self.reserved_len) };
        debug_assert!(unmapped.is_ok());
    }
}
