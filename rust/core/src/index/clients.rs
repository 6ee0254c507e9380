//! Clients: who is attached, and what becomes of what the dead leave behind.
//!
//! When a client is found dead or leaves, its pins and leases end and its saves that nobody claimed are dropped. What its
//! group may still be copying stays: claimed saves become ORPHANED, dispatched loads keep their entries. Both return when
//! no member of the group lives and a quarantine has passed, since a device may go on writing for a moment after its process.

use super::commit::{Commit, Table};
use super::namespaces::{read_label, store_label};
use super::records::{ClientRecord, ClientRef, client_state, hold_kind, slot_state};
use super::{Checked, Damaged, Index, MAX_CLIENT_RECORDS};

/// What a client is to the pool; for people, and for tools that must not count as users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Role {
    /// A scheduler: promises, allocates, dispatches.
    Scheduler = 1,
    /// A worker: claims, copies, completes.
    Worker = 2,
    /// Both in one, for any program.
    Pool = 3,
    /// Looks, cleans, serves nobody.
    Tool = 4,
}

impl Role {
    /// The role's name.
    pub fn name(self) -> &'static str {
        match self {
            Role::Scheduler => "scheduler",
            Role::Worker => "worker",
            Role::Pool => "pool",
            Role::Tool => "tool",
        }
    }

    /// The role of this name.
    pub fn by_name(name: &str) -> Option<Self> {
        [Role::Scheduler, Role::Worker, Role::Pool, Role::Tool].into_iter().find(|role| role.name() == name)
    }

    fn from_number(number: u32) -> Option<Self> {
        [Role::Scheduler, Role::Worker, Role::Pool, Role::Tool].into_iter().find(|role| *role as u32 == number)
    }
}

/// What a client says of itself when it attaches.
#[derive(Debug, Clone, Copy)]
pub struct Registration<'a> {
    /// What it is.
    pub role: Role,
    /// Its rank within its group.
    pub rank: u32,
    /// The group's digest; 0 where the client is on its own.
    pub group: u64,
    /// The group's name, for people.
    pub label: &'a str,
    /// Its liveness byte.
    pub byte: u32,
    /// The generation of that byte.
    pub byte_generation: u32,
    /// Its process, as its own pid namespace numbers it.
    pub pid: u32,
    /// Seconds since 1970.
    pub attached_at_unix: u64,
}

/// A client as people see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientInfo {
    /// The record's number.
    pub record: u32,
    /// The record's generation.
    pub generation: u32,
    /// Whether it is attached, as far as the index knows.
    pub live: bool,
    /// What it is.
    pub role: Option<Role>,
    /// Its rank within its group.
    pub rank: u32,
    /// Its process, as its own pid namespace numbers it.
    pub pid: u32,
    /// The group's name.
    pub label: String,
    /// Its liveness byte.
    pub byte: u32,
    /// The generation of that byte.
    pub byte_generation: u32,
    /// Seconds since 1970.
    pub attached_at_unix: u64,
}

/// What a reclaim did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// Clients found dead.
    pub died: u32,
    /// Records of the dead whose last blocks were taken back.
    pub released: u32,
    /// Records of the dead that still wait for their group's end or for the quarantine.
    pub waiting: u32,
    /// Holds of the dead that were ended after their group's end and the quarantine.
    pub holds_ended: u32,
}

impl Index<'_> {
    /// Takes a client record; `None` where all are in use. The first client after a time without any begins a new
    /// incarnation of the region, in which checksums are compared anew.
    pub fn register_client(&mut self, registration: &Registration<'_>) -> Checked<Option<ClientRef>> {
        if !self.has_live_client()? {
            self.root.incarnation = self.root.incarnation.wrapping_add(1);
        }
        for number in 0..self.clients.len() as u32 {
            let commit = self.client_commit(number)?;
            if commit.state != client_state::FREE {
                continue;
            }
            let record = self.client_mut(number)?;
            (record.group, record.attached_at_unix, record.gone_at) =
                (registration.group, registration.attached_at_unix, 0);
            (record.byte, record.byte_generation) = (registration.byte, registration.byte_generation);
            (record.role, record.rank, record.pid) = (registration.role as u32, registration.rank, registration.pid);
            record.label_len = store_label(&mut record.label, registration.label);
            let commit = commit.next_generation(client_state::LIVE);
            record.commit.raise(Table::Clients.record(number), commit);
            return Ok(Some(ClientRef { record: number, generation: commit.generation }));
        }
        Ok(None)
    }

    /// The client leaves by itself. What others of its group may still copy stays until they are gone too.
    pub fn deregister_client(&mut self, client: ClientRef) -> Checked<()> {
        if self.client_state(client)? != Some(client_state::LIVE) {
            return Ok(());
        }
        let number = client.record;
        let commit = self.client_commit(number)?;
        self.client(number)?.commit.lower(Table::Clients.record(number), commit.with_state(client_state::DYING));
        let mut left = [0u32; MAX_CLIENT_RECORDS as usize];
        self.bury_holds(&mut left)?;
        if left[number as usize] == 0 {
            self.client(number)?.commit.lower(Table::Clients.record(number), commit.with_state(client_state::FREE));
        }
        Ok(())
    }

    /// Takes back what the dead left behind, as far as it is safe at `now` (nanoseconds of the monotonic clock).
    ///
    /// `is_alive` tells whether a liveness byte is held by the generation given.
    pub fn reclaim(
        &mut self,
        now: u64,
        quarantine: u64,
        is_alive: &mut dyn FnMut(u32, u32) -> bool,
    ) -> Checked<Reclaimed> {
        let mut reclaimed = Reclaimed::default();
        let mut dying = false;
        for number in 0..self.clients.len() as u32 {
            let (commit, record) = (self.client_commit(number)?, self.client(number)?);
            if commit.state == client_state::LIVE && !is_alive(record.byte, record.byte_generation) {
                reclaimed.died += 1;
                record.commit.lower(Table::Clients.record(number), commit.with_state(client_state::DYING));
            }
            dying |= self.client_commit(number)?.state == client_state::DYING;
        }
        if dying {
            self.settle_dying(now, quarantine, &mut reclaimed)?;
        }
        Ok(reclaimed)
    }

    /// Ends what the dead left, in two walks over the holds however many they are.
    fn settle_dying(&mut self, now: u64, quarantine: u64, reclaimed: &mut Reclaimed) -> Checked<()> {
        let mut left = [0u32; MAX_CLIENT_RECORDS as usize];
        self.bury_holds(&mut left)?;
        let mut due = [false; MAX_CLIENT_RECORDS as usize];
        for number in 0..self.clients.len() as u32 {
            if self.client_commit(number)?.state == client_state::DYING {
                let at = number as usize;
                due[at] = left[at] > 0 && self.may_release(number, now, quarantine)?;
                reclaimed.waiting += u32::from(left[at] > 0 && !due[at]);
            }
        }
        if due.contains(&true) {
            reclaimed.holds_ended += self.end_holds_of(&due)?;
        }
        for number in 0..self.clients.len() as u32 {
            let (commit, at) = (self.client_commit(number)?, number as usize);
            if commit.state == client_state::DYING && (left[at] == 0 || due[at]) {
                self.client(number)?.commit.lower(Table::Clients.record(number), commit.with_state(client_state::FREE));
                reclaimed.released += 1;
            }
        }
        Ok(())
    }

    /// Whether the dead client's group is gone and has been for as long as the quarantine.
    fn may_release(&mut self, number: u32, now: u64, quarantine: u64) -> Checked<bool> {
        let group = self.client(number)?.group;
        if group != 0 && self.group_lives(group)? {
            self.client_mut(number)?.gone_at = 0;
            return Ok(false);
        }
        let record = self.client_mut(number)?;
        if record.gone_at == 0 || record.gone_at > now {
            record.gone_at = now.max(1);
        }
        Ok(now.saturating_sub(record.gone_at) >= quarantine)
    }

    fn has_live_client(&self) -> Checked<bool> {
        for number in 0..self.clients.len() as u32 {
            if self.client_commit(number)?.state == client_state::LIVE {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn group_lives(&self, group: u64) -> Checked<bool> {
        for number in 0..self.clients.len() as u32 {
            if self.client(number)?.group == group && self.client_commit(number)?.state == client_state::LIVE {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether `wanted` holds for the liveness byte and generation of any LIVE client in the group of `client`, itself included.
    /// A client without a group is on its own.
    pub fn any_of_group(&self, client: ClientRef, wanted: &mut dyn FnMut(u32, u32) -> bool) -> Checked<bool> {
        let group = self.client(client.record)?.group;
        for number in 0..self.clients.len() as u32 {
            let (commit, record) = (self.client_commit(number)?, self.client(number)?);
            let is_same = number == client.record || (group != 0 && record.group == group);
            if is_same && commit.state == client_state::LIVE && wanted(record.byte, record.byte_generation) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Ends what can end at once of the holds of all who are dying, and counts what must wait, by record. Doing it again
    /// changes nothing.
    fn bury_holds(&mut self, left: &mut [u32; MAX_CLIENT_RECORDS as usize]) -> Checked<()> {
        for hold in 0..self.touched_holds() {
            let Some(owner) = self.dying_owner(hold)? else { continue };
            if !self.bury_hold(hold)? {
                left[owner as usize] += 1;
            }
        }
        Ok(())
    }

    /// The record of the dying client that a hold belongs to, if it does.
    fn dying_owner(&self, hold: u32) -> Checked<Option<u32>> {
        if self.hold_commit(hold)?.state == hold_kind::FREE {
            return Ok(None);
        }
        let owner = self.hold(hold)?.owner;
        let dying = owner.record < MAX_CLIENT_RECORDS && self.client_state(owner)? == Some(client_state::DYING);
        Ok(dying.then_some(owner.record))
    }

    /// Ends a dead owner's hold where that is safe at once; false where it must wait.
    fn bury_hold(&mut self, hold: u32) -> Checked<bool> {
        let kind = self.hold_commit(hold)?.state;
        let record = self.hold(hold)?;
        let (slot, claimed, participants) = (record.slot, record.claimed, record.participants);
        match kind {
            hold_kind::PIN => {
                let slot = self.end_hold(hold)?;
                self.after_firm_hold(slot)?;
                Ok(true)
            }
            hold_kind::LEASE if claimed == 0 => {
                let slot = self.end_hold(hold)?;
                self.after_any_hold(slot)?;
                Ok(true)
            }
            hold_kind::SAVE if participants != 0 && claimed == 0 => {
                self.resolve_save(hold, false)?;
                Ok(true)
            }
            hold_kind::SAVE => {
                if !self.is_orphaned(slot) {
                    self.orphan_entry(slot)?;
                }
                Ok(false)
            }
            _ => Ok(false),
        }
    }

    /// Ends every hold of the dying clients that are due.
    fn end_holds_of(&mut self, due: &[bool; MAX_CLIENT_RECORDS as usize]) -> Checked<u32> {
        let mut ended = 0;
        for hold in 0..self.touched_holds() {
            if !self.dying_owner(hold)?.is_some_and(|owner| due[owner as usize]) {
                continue;
            }
            ended += 1;
            match self.hold_commit(hold)?.state {
                hold_kind::SAVE => self.resolve_save(hold, false)?,
                hold_kind::LEASE => {
                    let slot = self.end_hold(hold)?;
                    self.after_any_hold(slot)?;
                }
                _ => {
                    let slot = self.end_hold(hold)?;
                    self.after_firm_hold(slot)?;
                }
            }
        }
        Ok(ended)
    }

    fn touched_holds(&self) -> u32 {
        self.root.holds_touched.min(self.layout.num_holds)
    }

    /// Whether the client's record is LIVE in this generation.
    pub fn is_registered(&self, client: ClientRef) -> Checked<bool> {
        Ok(self.client_state(client)? == Some(client_state::LIVE))
    }

    /// Whether the owner is known, alive or dying.
    pub(super) fn client_state(&self, client: ClientRef) -> Checked<Option<u8>> {
        let Commit { state, generation } = self.client_commit(client.record)?;
        Ok((generation == client.generation && state != client_state::FREE).then_some(state))
    }

    /// Every client that has a record.
    pub fn client_infos(&self) -> Vec<ClientInfo> {
        (0..self.clients.len() as u32).filter_map(|number| self.client_info(number)).collect()
    }

    fn client_info(&self, number: u32) -> Option<ClientInfo> {
        let record = self.clients.get(number as usize)?;
        let commit = record.commit.load(Table::Clients.record(number))?;
        (commit.state != client_state::FREE).then(|| ClientInfo {
            record: number,
            generation: commit.generation,
            live: commit.state == client_state::LIVE,
            role: Role::from_number(record.role),
            rank: record.rank,
            pid: record.pid,
            label: read_label(&record.label, record.label_len),
            byte: record.byte,
            byte_generation: record.byte_generation,
            attached_at_unix: record.attached_at_unix,
        })
    }

    pub(super) fn client_commit(&self, number: u32) -> Checked<Commit> {
        let commit = self.client(number)?.commit.load(Table::Clients.record(number));
        commit.ok_or(Damaged(&"a client's check bits do not fit"))
    }

    pub(super) fn client(&self, number: u32) -> Checked<&ClientRecord> {
        self.clients.get(number as usize).ok_or(Damaged(&"a client is out of range"))
    }

    pub(super) fn client_mut(&mut self, number: u32) -> Checked<&mut ClientRecord> {
        self.clients.get_mut(number as usize).ok_or(Damaged(&"a client is out of range"))
    }

    /// Whether this slot's blocks wait for a dead owner's group.
    pub(super) fn is_orphaned(&self, slot: u32) -> bool {
        self.state_of(slot) == slot_state::ORPHANED
    }
}
